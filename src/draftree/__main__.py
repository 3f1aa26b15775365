from draftree.cli.app import main

main()
